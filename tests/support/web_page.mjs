// Translates with the modules of an exported page, in Node and without the page: node web_page.mjs FOLDER.
//
// Reads {texts, options, search} from standard input, as JSON, and writes {results, sources}, the ids of each source.
// `search` has other settings than those of the folder.

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = resolve(process.argv[2]);
const load = (name) => import(pathToFileURL(join(folder, name)).href);
const read = (name) => readFileSync(join(folder, name));
const readJson = (name) => JSON.parse(read(name).toString());

const [{ Engine }, { Translator }, { Tokenizer }, runtime] = await Promise.all(
  ["engine.js", "translator.js", "runtime/tokenizers.min.mjs", "runtime/ort.wasm.min.mjs"].map(load),
);
runtime.env.wasm.numThreads = 1;
const { texts, options, search } = JSON.parse(readFileSync(0, "utf-8"));
const settings = readJson("settings.json");
Object.assign(settings.search, search);
const [encoder, decoder] = ["model/encoder.onnx", "model/decoder.onnx"].map(read);
const engine = await Engine.load(runtime, { encoder, decoder }, settings.ids);
const tokenizer = new Tokenizer(readJson("model/tokenizer.json"), readJson("model/tokenizer_config.json"));
const translator = new Translator(engine, tokenizer, settings);
const results = await translator.translate(texts, options);
const sources = texts.map((text) => translator.encode(text).ids);
process.stdout.write(JSON.stringify({ results, sources }));
