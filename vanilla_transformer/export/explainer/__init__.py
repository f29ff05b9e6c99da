"""A page that shows every number between a sentence and its translation: its folder, and the page's own files.

| file                       | what it does                                             | what it knows of            |
| -------------------------- | -------------------------------------------------------- | --------------------------- |
| `explain.js`               | what a number was computed from, with the numbers        | values, weights, notes      |
| `tracer.js`                | runs the graphs: all values, the tree of the search      | ONNX Runtime, `search.js`   |
| `explainer-worker.js`      | loads all that, and keeps it away from the page          | the tracer                  |
| `explainer.js`             | what people see (`index.html`, `explainer.css`)          | the worker's messages       |
| `matrix.js`, `tree.js`     | numbers as colours; the beams as a tree                  | what they are given         |
| `panel.js`                 | the explanation of a number                              | `explain.js`                |
| `texts.js`, `texts.*.json` | what the page says, in English and Chinese               | nothing                     |

`recording.py` computes the values, by name; `folder.py` writes them as graphs. `search.js`, `translator.js`,
`loading.js` and `service-worker.js` are those of the page that translates (`export.web`).
"""

from .folder import export_explainer

__all__ = ["export_explainer"]
