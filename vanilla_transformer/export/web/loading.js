/** What workers share: loading the folder's files, ONNX Runtime and the tokenizer; answering the newest request. */

/** @import { TextTokenizer } from "./translator.js" */

/** @typedef {(loaded: number, total: number) => void} OnProgress  Told in bytes. */

/**
 * @template Settings
 * @typedef {object} Loaded
 * @property {typeof import("./runtime/ort.wasm.min.mjs")} runtime
 * @property {Settings} settings  What settings.json says.
 * @property {TextTokenizer} tokenizer
 * @property {(name: string) => Uint8Array<ArrayBuffer>} read  The bytes of a file, by its path in the folder.
 */

/**
 * Fetches files side by side, and tells how far that is. One that is not whole is fetched anew, wherever it was kept.
 * @param {Record<string, number>} sizes
 * @param {OnProgress} onProgress
 * @returns {Promise<Map<string, Uint8Array<ArrayBuffer>>>}
 */
async function fetchFiles(sizes, onProgress) {
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
      if (!all.signal.aborted) onProgress(sum, total);
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

/**
 * @template Settings
 * @param {OnProgress} onProgress
 * @param {number} mostThreads
 * @returns {Promise<Loaded<Settings>>}
 */
export async function loadFolder(onProgress, mostThreads) {
  /** @type {Settings & {files: Record<string, number>}} */
  const settings = await (await fetch("settings.json")).json();
  const isModule = (/** @type {string} */ name) => name.endsWith(".mjs");
  const sizes = Object.fromEntries(Object.entries(settings.files).filter(([name]) => !isModule(name)));
  const files = await fetchFiles(sizes, onProgress);
  const read = (/** @type {string} */ name) => /** @type {Uint8Array<ArrayBuffer>} */ (files.get(name));
  const readJson = (/** @type {string} */ name) => JSON.parse(new TextDecoder().decode(read(name)));
  const runtime = await import("./runtime/ort.wasm.min.mjs");
  const { Tokenizer } = await import("./runtime/tokenizers.min.mjs");
  const { wasm } = runtime.env;
  wasm.numThreads = crossOriginIsolated ? Math.min(mostThreads, navigator.hardwareConcurrency) : 1;
  wasm.wasmBinary = read("runtime/ort-wasm-simd-threaded.wasm").buffer;
  wasm.wasmPaths = { mjs: new URL("./runtime/ort-wasm-simd-threaded.mjs", import.meta.url).href };
  const tokenizer = new Tokenizer(readJson("model/tokenizer.json"), readJson("model/tokenizer_config.json"));
  return { runtime, settings, tokenizer, read };
}

const { port1, port2 } = new MessageChannel();
/** Lets messages come in, of which a newer request may be one. */
const pause = () => new Promise((resolve) => {
  port1.onmessage = resolve;
  port2.postMessage(null);
});

class Replaced extends Error {}

/**
 * Works on requests, one after the other: the sessions are not made for two at a time. A newer one ends those before.
 * Errors are posted as `{type: "error", id, message}`; the id of one in loading is null.
 * @template Model
 * @template {{id: number}} Request
 * @param {Promise<Model>} loading
 * @param {(model: Model, request: Request, beforeStep: () => Promise<void>) => Promise<void>} work  `beforeStep` is to
 *     be called often: it throws once there is a newer request.
 */
export function answerRequests(loading, work) {
  let newest = 0;
  const fail = (/** @type {number | null} */ id, /** @type {unknown} */ error) => {
    postMessage({ type: "error", id, message: `${error instanceof Error ? error.message : error}` });
  };
  loading.catch((error) => fail(null, error));
  let queue = /** @type {Promise<unknown>} */ (loading);
  onmessage = ({ data }) => {
    const request = /** @type {Request} */ (data);
    newest = request.id;
    const beforeStep = async () => {
      await pause();
      if (request.id !== newest) throw new Replaced();
    };
    queue = queue.then(async () => {
      if (request.id !== newest) return;
      try {
        await work(await loading, request, beforeStep);
      } catch (error) {
        if (!(error instanceof Replaced)) fail(request.id, error);
      }
    }, () => {});
  };
}
