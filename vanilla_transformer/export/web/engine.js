/**
 * The model in ONNX Runtime: two sessions, and the decoder's cache. It knows ids, and neither text nor search.
 *
 * Shapes: B  sentences, R  rows (beams), S  source length, P  target positions in the cache, H  heads, D  d_model.
 */

/** @import { InferenceSession, Tensor } from "onnxruntime-common" */
/** @import { Candidates } from "./search.js" */

/**
 * @typedef {object} Runtime  What is needed of the npm package onnxruntime-web.
 * @property {typeof import("onnxruntime-common").InferenceSession} InferenceSession
 * @property {typeof import("onnxruntime-common").Tensor} Tensor
 */

/**
 * @typedef {object} Source  Sentences that were read by the encoder.
 * @property {Tensor} mask  (B, S): 1 at tokens, 0 at padding.
 * @property {Tensor} states  (B, S, D).
 */

/**
 * @typedef {object} ModelIds  The ids that the model gives a meaning to.
 * @property {number} pad
 * @property {number} start  With it, each translation begins.
 */

const CANDIDATES = ["candidates.values", "candidates.ids"];

/**
 * Some rows of a tensor, in the order that is given; the tensor itself if these are all, in their order.
 * @param {Runtime} runtime
 * @param {Tensor} tensor
 * @param {number[]} rows
 * @returns {Tensor}
 */
export function takeRows(runtime, tensor, rows) {
  if (rows.length === tensor.dims[0] && rows.every((row, place) => row === place)) return tensor;
  const size = tensor.size / tensor.dims[0];
  const data = /** @type {Float32Array} */ (tensor.data);
  const taken = new /** @type {Float32ArrayConstructor} */ (data.constructor)(rows.length * size);
  rows.forEach((row, place) => taken.set(data.subarray(row * size, (row + 1) * size), place * size));
  return new runtime.Tensor(tensor.type, taken, [rows.length, ...tensor.dims.slice(1)]);
}

/**
 * A tensor of ids or of a mask, from rows of one length.
 * @param {Runtime} runtime
 * @param {number[][]} rows
 * @returns {Tensor}
 */
function makeIds(runtime, rows) {
  return new runtime.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
}

/** Encoder and decoder. */
export class Engine {
  /**
   * @param {Runtime} runtime
   * @param {InferenceSession} encoder
   * @param {InferenceSession} decoder
   * @param {ModelIds} ids
   */
  constructor(runtime, encoder, decoder, ids) {
    this.runtime = runtime;
    this.encoder = encoder;
    this.decoder = decoder;
    this.ids = ids;
  }

  /**
   * @param {Runtime} runtime
   * @param {{encoder: Uint8Array, decoder: Uint8Array}} graphs  The files `encoder.onnx` and `decoder.onnx`.
   * @param {ModelIds} ids
   * @returns {Promise<Engine>}
   */
  static async load(runtime, graphs, ids) {
    const encoder = await runtime.InferenceSession.create(graphs.encoder);
    const decoder = await runtime.InferenceSession.create(graphs.decoder);
    return new Engine(runtime, encoder, decoder, ids);
  }

  /**
   * Reads sentences, which are padded to the longest of them.
   * @param {number[][]} sentences  Ids with the end symbol, at least one for each.
   * @returns {Promise<Source>}
   */
  async encode(sentences) {
    const length = Math.max(...sentences.map((ids) => ids.length));
    const pad = (/** @type {number[]} */ ids, /** @type {number} */ value) =>
      [...ids, ...Array(length - ids.length).fill(value)];
    const mask = makeIds(this.runtime, sentences.map((ids) => pad(ids.map(() => 1), 0)));
    const input = makeIds(this.runtime, sentences.map((ids) => pad(ids, this.ids.pad)));
    const outputs = await this.encoder.run({ input_ids: input, attention_mask: mask });
    return { mask, states: outputs.last_hidden_state };
  }

  /**
   * @param {Source} source
   * @returns {CachingDecoder}  For a search.
   */
  decode(source) {
    return new CachingDecoder(this, source);
  }
}

/** The decoder with the keys and values of what was decoded, and of the source: a `Decoder` of search.js. */
export class CachingDecoder {
  /**
   * @param {Engine} engine
   * @param {Source} source
   */
  constructor(engine, source) {
    this.engine = engine;
    this.source = source;
    /** The sentence of each row. */
    this.sentences = Array.from({ length: source.mask.dims[0] }, (_, sentence) => sentence);
    /** @type {Record<string, Tensor>} Keys and values, by the names of the decoder's inputs. */
    this.past = {};
  }

  /** @returns {Promise<Candidates>} */
  start() {
    const { runtime, decoder, ids } = this.engine;
    for (const input of decoder.inputMetadata) {
      if (!input.name.startsWith("past_key_values.") || !input.isTensor) continue;
      const [, heads, , size] = /** @type {number[]} */ (input.shape);
      const shape = [this.sentences.length, heads, 0, size];
      this.past[input.name] = new runtime.Tensor("float32", new Float32Array(0), shape);
    }
    return this.run(this.sentences.map(() => ids.start));
  }

  /**
   * @param {number[]} tokens
   * @param {number[]} rows
   * @returns {Promise<Candidates>}
   */
  step(tokens, rows) {
    const { runtime } = this.engine;
    const sentences = rows.map((row) => this.sentences[row]);
    // What is known of the source stays where it is while each row keeps its sentence.
    const keepsSource =
      sentences.length === this.sentences.length && sentences.every((each, row) => each === this.sentences[row]);
    for (const [name, tensor] of Object.entries(this.past)) {
      if (!keepsSource || name.includes(".decoder.")) this.past[name] = takeRows(runtime, tensor, rows);
    }
    if (!keepsSource) {
      const { mask, states } = this.source;
      this.source = { mask: takeRows(runtime, mask, rows), states: takeRows(runtime, states, rows) };
    }
    this.sentences = sentences;
    return this.run(tokens);
  }

  /**
   * @param {number[]} tokens  One for each row.
   * @returns {Promise<Candidates>}
   */
  async run(tokens) {
    const { runtime, decoder } = this.engine;
    const names = Object.keys(this.past);
    // The source's keys and values are computed once, by the first step.
    const isNew = (/** @type {string} */ name) => name.includes(".decoder.") || this.past[name].dims[2] === 0;
    const wanted = names.filter(isNew);
    const present = (/** @type {string} */ name) => name.replace("past_key_values.", "present.");
    const inputs = {
      input_ids: makeIds(runtime, tokens.map((token) => [token])),
      encoder_attention_mask: this.source.mask,
      encoder_hidden_states: this.source.states,
      ...this.past,
    };
    const outputs = await decoder.run(inputs, [...CANDIDATES, ...wanted.map(present)]);
    for (const name of wanted) this.past[name] = outputs[present(name)];
    const [values, ids] = CANDIDATES.map((name) => outputs[name]);
    return {
      values: /** @type {Float32Array} */ (values.data),
      ids: /** @type {Int32Array} */ (ids.data),
      count: values.dims[1],
    };
  }
}
