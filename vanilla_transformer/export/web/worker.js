/** Loads the model and translates, away from the page, which stays at hand while this works. */

import { Engine } from "./engine.js";
import { answerRequests, loadFolder } from "./loading.js";
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

/**
 * @param {Translator} translator
 * @param {Request} request
 * @param {() => Promise<void>} beforeStep
 */
async function translate(translator, { id, texts, numBeams, numWanted }, beforeStep) {
  const start = performance.now();
  let tokens = 0;
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

answerRequests(load(), translate);
