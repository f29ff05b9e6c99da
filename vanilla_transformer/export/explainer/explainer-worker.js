/** Loads the model and runs it, away from the page, which stays at hand while this works. */

/** @import { Loaded } from "./loading.js" */
/** @import { Notes } from "./explain.js" */
/** @import { SearchSettings, Traced, Written } from "./tracer.js" */
/** @import { Settings, TextTokenizer } from "./translator.js" */
import { answerRequests, loadFolder } from "./loading.js";
import { Tracer } from "./tracer.js";

/**
 * @typedef {{type: "trace", id: number, text: string, hidden: number[]} & SearchSettings
 *     | {type: "follow", id: number, tokens: number[]}} Request
 *     Reads and translates a text, or shows how the decoder would write other tokens. A newer one ends the one before.
 */
/**
 * @typedef {{type: "progress", loaded: number, total: number}
 *     | {type: "ready", labels: string[], notes: Notes, weights: ArrayBuffer}
 *     | {type: "traced", id: number, traced: Traced | null, milliseconds: number}
 *     | {type: "followed", id: number, written: Written}
 *     | {type: "error", id: number | null, message: string}} Answer
 */

/** @param {Answer} answer */
const answer = (answer) => postMessage(answer);

/** @returns {Promise<Tracer>} */
async function load() {
  /** @type {Loaded<Settings>} */
  const { runtime, settings, tokenizer, read } = await loadFolder((loaded, total) => {
    answer({ type: "progress", loaded, total });
  }, 1);  // for one sentence, threads would wait for each other more than they compute
  /** @type {Notes} */
  const notes = JSON.parse(new TextDecoder().decode(read("model/notes.json")));
  const weights = read("model/weights.bin");
  const graphs = { encoder: read("model/encoder.onnx"), decoder: read("model/decoder.onnx") };
  const tracer = await Tracer.load(runtime, { ...graphs, weights, output: notes.output }, tokenizer, settings);
  const labels = labelTokens(tokenizer, notes.weights["lm_head.weight"].shape[0], read("model/tokenizer.json"));
  answer({ type: "ready", labels, notes, weights: weights.buffer });
  return tracer;
}

/**
 * What each token of the vocabulary looks like, a space in front of it too.
 * @param {TextTokenizer} tokenizer
 * @param {number} size
 * @param {Uint8Array} file
 * @returns {string[]}
 */
function labelTokens(tokenizer, size, file) {
  /** @type {Record<string, number>} */
  const vocabulary = JSON.parse(new TextDecoder().decode(file)).model.vocab;
  const withSpace = new Set(Object.entries(vocabulary).filter(([piece]) => piece.startsWith("Ġ")).map(([, id]) => id));
  return Array.from({ length: size }, (_, id) => {
    const text = tokenizer.decode([id], { skip_special_tokens: false }).trim().replace(/\s/g, "␣");
    return `${withSpace.has(id) ? "␣" : ""}${text}` || "␣";
  });
}

/**
 * @param {Tracer} tracer
 * @param {Request} request
 * @param {() => Promise<void>} beforeStep
 */
async function work(tracer, request, beforeStep) {
  const { id } = request;
  if (request.type === "follow") {
    answer({ type: "followed", id, written: await tracer.write(request.tokens) });
    return;
  }
  const start = performance.now();
  const read = await tracer.encode(request.text, request.hidden);
  let traced = null;
  if (read) {
    const { numBeams, temperature } = request;
    const searched = await tracer.search({ numBeams, temperature, beforeStep });
    traced = { read, searched, written: await tracer.write(searched.best[0].tokens) };
  }
  answer({ type: "traced", id, traced, milliseconds: performance.now() - start });
}

answerRequests(load(), work);
