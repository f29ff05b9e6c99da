"""A page that translates in the browser: what is written into its folder, and the page's own files beside it.

| file                | what it does                                                   | what it knows of            |
|---------------------|----------------------------------------------------------------|-----------------------------|
| `search.js`         | greedy and beam search                                         | nothing: a decoder is given |
| `engine.js`         | sessions of ONNX Runtime, the decoder's cache                  | ids and tensors             |
| `translator.js`     | texts, batches                                                 | the two above, a tokenizer  |
| `loading.js`        | fetches the folder's files, starts ONNX Runtime                | the tokenizer's package     |
| `worker.js`         | keeps all that away from the page                              | the above                   |
| `page.js`           | what people see (`index.html`, `page.css`)                     | the worker's messages       |
| `service-worker.js` | keeps the files for visits without a network                   | their names                 |
"""

from .folder import export_web

__all__ = ["export_web"]
