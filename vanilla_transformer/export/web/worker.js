/** Loads the model and translates, away from the page, which stays at hand while this works. */

import { Engine } from "./engine.js";
import { loadFolder } from "./loading.js";
import { Translator } from "./translator.js";

/** @import { Loaded } from "./loading.js" */
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

/** @returns {Promise<Translator>} */
async function load() {
  /** @type {Loaded<Settings>} */
  const { runtime, settings, tokenizer, read } = await loadFolder((loaded, total) => {
    answer({ type: "progress", loaded, total });
  }, MOST_THREADS);
  const graphs = { encoder: read("model/encoder.onnx"), decoder: read("model/decoder.onnx") };
  const engine = await Engine.load(runtime, graphs, settings.ids);
  const translator = new Translator(engine, tokenizer, settings);
  await translator.translate(["a"], { numBeams: 2 });  // browsers make code fast when it first runs
  answer({ type: "ready", threads: runtime.env.wasm.numThreads ?? 1 });
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
