// Translates with the npm package @huggingface/transformers as anybody would: node transformersjs.mjs PACKAGES FOLDER.
//
// Reads {texts, dtype, batch_size, settings} from standard input, as JSON, and writes {ids, texts, translations}: what
// the texts are encoded to, and decoded again. Without a dtype nothing is translated. No model is looked for elsewhere.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [packages, folder] = process.argv.slice(2);
const found = createRequire(join(resolve(packages), "any.js")).resolve("@huggingface/transformers");
const { AutoTokenizer, env, pipeline } = await import(pathToFileURL(found).href);
env.allowRemoteModels = false;

const { texts, dtype, batch_size, settings } = JSON.parse(readFileSync(0, "utf-8"));
const tokenizer = await AutoTokenizer.from_pretrained(resolve(folder));
const ids = texts.map((text) => tokenizer(text, { return_tensor: false }).input_ids);
const answer = { ids, texts: ids.map((each) => tokenizer.decode(each, { skip_special_tokens: true })) };
if (dtype) {
  const translator = await pipeline("translation", resolve(folder), { dtype });
  answer.translations = [];
  for (let start = 0; start < texts.length; start += batch_size) {
    const outputs = await translator(texts.slice(start, start + batch_size), settings);
    answer.translations.push(...outputs.map((output) => output.translation_text));
  }
}
process.stdout.write(JSON.stringify(answer));
