/** Loads the model and translates, away from the page, which stays at hand while this works. */

import { Engine } from "./engine.js";
import { Translator } from "./translator.js";

/** @import { Result, Settings } from "./translator.js" */

/**
 * @typedef {{type: "translate", id: number, texts: string[], numBeams: number, numWanted: number}} Request
 *     A newer one ends the one before.
 */
/**
 * @typedef {{type: "progress", loaded: number, total: number}
 *     | {type: "ready", threads: number}
 *     | {type: "result", id: number, index: number, result: Result}
 *     | {type: "done", id: number, milliseconds: number, tokens: number}
 *     | {type: "error", id: number | null, message: string}} Answer
 */

const MOST_THREADS = 4;

/** @param {Answer} answer */
const answer = (answer) => postMessage(answer);

/**
 * Fetches files side by side, and tells how far that is. One that is not whole is fetched anew, wherever it was kept.
 * @param {Record<string, number>} sizes
 * @returns {Promise<Map<string, Uint8Array<ArrayBuffer>>>}
 */
async function fetchFiles(sizes) {
  const total = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  /** @type {Record<string, number>} */
  const loaded = {};
  const all = new AbortController();
  const read = async (/** @type {string} */ name, /** @type {RequestCache} */ cache) => {
    const response = await fetch(name, { cache, signal: all.signal });
    if (!response.ok || !response.body) throw new Error(`${name} could not be loaded (${response.status}).`);
    const bytes = new Uint8Array(sizes[name]);
    loaded[name] = 0;
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) return loaded[name] === bytes.length ? bytes : null;
      if (loaded[name] + value.length > bytes.length) return null;
      bytes.set(value, loaded[name]);
      loaded[name] += value.length;
      const sum = Object.values(loaded).reduce((sum, size) => sum + size, 0);
      if (!all.signal.aborted) answer({ type: "progress", loaded: sum, total });
    }
  };
  const fetchFile = async (/** @type {string} */ name) => {
    const bytes = (await read(name, "default")) ?? (await read(name, "reload"));
    if (!bytes) throw new Error(`${name} is not whole: load the page again.`);
    return /** @type {[string, Uint8Array<ArrayBuffer>]} */ ([name, bytes]);
  };
  try {
    return new Map(await Promise.all(Object.keys(sizes).map(fetchFile)));
  } finally {
    all.abort();  // after a failure nothing else is fetched
  }
}

/** @returns {Promise<Translator>} */
async function load() {
  /** @type {Settings & {files: Record<string, number>}} */
  const settings = await (await fetch("settings.json")).json();
  const isModule = (/** @type {string} */ name) => name.endsWith(".mjs");
  const sizes = Object.fromEntries(Object.entries(settings.files).filter(([name]) => !isModule(name)));
  const files = await fetchFiles(sizes);
  const read = (/** @type {string} */ name) => /** @type {Uint8Array<ArrayBuffer>} */ (files.get(name));
  const readJson = (/** @type {string} */ name) => JSON.parse(new TextDecoder().decode(read(name)));
  const runtime = await import("./runtime/ort.wasm.min.mjs");
  const { Tokenizer } = await import("./runtime/tokenizers.min.mjs");
  const { wasm } = runtime.env;
  wasm.numThreads = crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency) : 1;
  wasm.wasmBinary = read("runtime/ort-wasm-simd-threaded.wasm").buffer;
  wasm.wasmPaths = { mjs: new URL("./runtime/ort-wasm-simd-threaded.mjs", import.meta.url).href };
  const graphs = { encoder: read("model/encoder.onnx"), decoder: read("model/decoder.onnx") };
  const engine = await Engine.load(runtime, graphs, settings.ids);
  const tokenizer = new Tokenizer(readJson("model/tokenizer.json"), readJson("model/tokenizer_config.json"));
  const translator = new Translator(engine, tokenizer, settings);
  await translator.translate(["a"], { numBeams: 2 });  // browsers make code fast when it first runs
  answer({ type: "ready", threads: wasm.numThreads });
  return translator;
}

const { port1, port2 } = new MessageChannel();
/** Lets messages come in, of which a newer request may be one. */
const pause = () => new Promise((resolve) => {
  port1.onmessage = resolve;
  port2.postMessage(null);
});

let newest = 0;
class Replaced extends Error {}

/**
 * @param {Translator} translator
 * @param {Request} request
 */
async function translate(translator, { id, texts, numBeams, numWanted }) {
  const start = performance.now();
  let tokens = 0;
  const beforeStep = async () => {
    await pause();
    if (id !== newest) throw new Replaced();
  };
  await translator.translate(texts, {
    numBeams,
    numWanted,
    beforeStep,
    onResult(index, result) {
      tokens += result.translations[0]?.tokens.length ?? 0;
      answer({ type: "result", id, index, result });
    },
  });
  answer({ type: "done", id, milliseconds: performance.now() - start, tokens });
}

const loading = load();
loading.catch((error) => answer({ type: "error", id: null, message: `${error?.message ?? error}` }));
/** One translation after the other: the sessions are not made for two at a time. */
let queue = /** @type {Promise<unknown>} */ (loading);

onmessage = ({ data }) => {
  const request = /** @type {Request} */ (data);
  newest = request.id;
  queue = queue.then(async () => {
    if (request.id !== newest) return;
    try {
      await translate(await loading, request);
    } catch (error) {
      if (error instanceof Replaced) return;
      answer({ type: "error", id: request.id, message: `${error instanceof Error ? error.message : error}` });
    }
  }, () => {});
};
