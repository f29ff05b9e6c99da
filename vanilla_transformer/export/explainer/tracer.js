/**
 * All values of a sentence and of its translation, by the graphs of recording.py, and the tree of the search.
 *
 * Prefixes are decoded as a whole, without a cache; what comes behind a prefix is kept, so that another number of beams
 * or another temperature is searched at once.
 */

/** @import { InferenceSession, Tensor } from "onnxruntime-common" */
/** @import { Runtime } from "./engine.js" */
/** @import { Beam, Candidates } from "./search.js" */
/** @import { Settings, TextTokenizer } from "./translator.js" */
import { beamSearch, greedySearch, readTokens } from "./search.js";
import { Translator } from "./translator.js";

/** @typedef {{dims: number[], data: Float32Array}} Value  With no dimension for sentences: (L, D) or (H, L, K). */
/** @typedef {Record<string, Value>} Values  By the names of recording.py. */

/**
 * @typedef {object} TreeNode  A beam of the search.
 * @property {number} token
 * @property {number} parent  The index of the node that it continues, -1 at the first token.
 * @property {number} step  From 0 on.
 * @property {number} score  The log-probability of all its tokens.
 * @property {"open" | "ended" | "dropped"} state  What the search made of it.
 * @property {number | null} final  Of what has ended: its score divided by the length penalty.
 */

/**
 * @typedef {object} Read  A sentence as the encoder reads it.
 * @property {number[]} ids
 * @property {boolean[]} allowed  Whether a token may be looked at.
 * @property {boolean} isCut
 * @property {Values} values
 */

/**
 * @typedef {object} Written  A translation as the decoder writes it.
 * @property {number[]} tokens  What it wrote, the end symbol included.
 * @property {number[]} ids  What it read: the start symbol, and all tokens but the last.
 * @property {Values} values
 */

/** @typedef {{tokens: number[], text: string}} Found  A translation. */
/** @typedef {{nodes: TreeNode[], best: Found[]}} Searched  `best`: the translations found, the best first. */
/** @typedef {{numBeams: number, temperature: number}} SearchSettings */
/** @typedef {{read: Read, searched: Searched, written: Written}} Traced */

/** The most tokens of either side: more do not fit on a screen. */
export const MOST_TOKENS = 32;
/** How many of the likeliest next tokens the search looks at: twice the most beams. */
const CANDIDATES = 16;

/**
 * The logarithm of the softmax of logits that are divided by a temperature.
 * @param {Float32Array} logits
 * @param {number} temperature
 */
export function logSoftmax(logits, temperature) {
  let largest = -Infinity;
  for (const logit of logits) if (logit > largest) largest = logit;
  let sum = 0;
  for (const logit of logits) sum += Math.exp((logit - largest) / temperature);
  const log = Math.log(sum);
  return logits.map((logit) => (logit - largest) / temperature - log);
}

/**
 * The places of the largest numbers, the largest first.
 * @param {Float32Array} numbers
 * @param {number} count
 */
export function findLargest(numbers, count) {
  const places = [...numbers.keys()];
  return places.sort((a, b) => numbers[b] - numbers[a] || a - b).slice(0, count);
}

/** What the search decodes with: a `Decoder` of search.js. */
class PrefixDecoder {
  /**
   * @param {Tracer} tracer
   * @param {number} temperature
   */
  constructor(tracer, temperature) {
    this.tracer = tracer;
    this.temperature = temperature;
    /** @type {number[][]} */
    this.prefixes = [];
  }

  /** @returns {Promise<Candidates>} */
  start() {
    this.prefixes = [[this.tracer.settings.ids.start]];
    return this.findCandidates();
  }

  /**
   * @param {number[]} tokens
   * @param {number[]} rows
   * @returns {Promise<Candidates>}
   */
  step(tokens, rows) {
    this.prefixes = rows.map((row, place) => [...this.prefixes[row], tokens[place]]);
    return this.findCandidates();
  }

  /** @returns {Promise<Candidates>} */
  async findCandidates() {
    const logits = await this.tracer.findLogits(this.prefixes);
    const count = Math.min(CANDIDATES, logits[0].length);
    const values = new Float32Array(logits.length * count), ids = new Int32Array(logits.length * count);
    logits.forEach((row, place) => {
      const logProbs = logSoftmax(row, this.temperature);
      const found = findLargest(logProbs, count);
      ids.set(found, place * count);
      values.set(found.map((token) => logProbs[token]), place * count);
    });
    return { values, ids, count };
  }
}

/** A model that shows how it translates. */
export class Tracer {
  /**
   * @param {Runtime} runtime
   * @param {{encoder: InferenceSession, decoder: InferenceSession}} sessions
   * @param {string} output  The name of what the decoder reads of the encoder.
   * @param {TextTokenizer} tokenizer
   * @param {Settings} settings
   */
  constructor(runtime, sessions, output, tokenizer, settings) {
    this.runtime = runtime;
    this.sessions = sessions;
    this.output = output;
    this.settings = { ...settings, max_source_tokens: Math.min(settings.max_source_tokens ?? Infinity, MOST_TOKENS) };
    // Of a Translator, only what it does with texts is needed here.
    this.translator = new Translator(/** @type {any} */ (null), tokenizer, this.settings);
    /** @type {Map<string, Float32Array>} Logits behind a prefix of the present sentence. */
    this.logits = new Map();
    this.present = "";
    /** @type {Read | null} */
    this.read = null;
    /** @type {{mask: Tensor, states: Tensor} | null} */
    this.source = null;
  }

  /**
   * @param {Runtime} runtime
   * @param {{encoder: Uint8Array, decoder: Uint8Array, weights: Uint8Array, output: string}} model
   * @param {TextTokenizer} tokenizer
   * @param {Settings} settings
   */
  static async load(runtime, { encoder, decoder, weights, output }, tokenizer, settings) {
    const options = { externalData: [{ path: "weights.bin", data: weights }] };
    const sessions = {
      encoder: await runtime.InferenceSession.create(encoder, options),
      decoder: await runtime.InferenceSession.create(decoder, options),
    };
    return new Tracer(runtime, sessions, output, tokenizer, settings);
  }

  /**
   * @param {number[][]} rows
   * @returns {Tensor}
   */
  makeIds(rows) {
    return new this.runtime.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
  }

  /**
   * Reads a text, of which some tokens may be hidden; `null` if there is nothing to read.
   * @param {string} text
   * @param {number[]} hidden  Places of tokens that nobody may look at.
   * @returns {Promise<Read | null>}
   */
  async encode(text, hidden) {
    const { ids, isCut } = this.translator.encode(text);
    if (!ids.length) return null;
    const allowed = ids.map((_, place) => !hidden.includes(place));
    if (!allowed.includes(true)) allowed[0] = true;
    const present = JSON.stringify([ids, allowed]);
    if (present === this.present && this.read) return this.read;
    const mask = this.makeIds([allowed.map(Number)]);
    const outputs = await this.sessions.encoder.run({ input_ids: this.makeIds([ids]), attention_mask: mask });
    this.logits.clear();
    this.present = present;
    this.source = { mask, states: outputs[this.output] };
    this.read = { ids, allowed, isCut, values: takeValues(outputs) };
    return this.read;
  }

  /**
   * @param {number[][]} prefixes  All of one length, the start symbol included.
   * @param {string[]} [names]  Of the values that are wanted; all, if none are named.
   */
  decode(prefixes, names) {
    if (!this.source) throw new Error("There is no sentence to translate.");
    const { mask, states } = this.source;
    const inputs = { input_ids: this.makeIds(prefixes), encoder_attention_mask: mask, encoder_hidden_states: states };
    return this.sessions.decoder.run(inputs, names ?? this.sessions.decoder.outputNames);
  }

  /**
   * What comes behind each prefix.
   * @param {number[][]} prefixes
   * @returns {Promise<Float32Array[]>}
   */
  async findLogits(prefixes) {
    const missing = prefixes.filter((prefix) => !this.logits.has(prefix.join()));
    if (missing.length) {
      const { logits } = await this.decode(missing, ["logits"]);
      const [, length, size] = logits.dims;
      const data = /** @type {Float32Array} */ (logits.data);
      missing.forEach((prefix, row) => {
        const end = (row + 1) * length * size;
        this.logits.set(prefix.join(), data.slice(end - size, end));
      });
    }
    return prefixes.map((prefix) => /** @type {Float32Array} */ (this.logits.get(prefix.join())));
  }

  /**
   * Searches the present sentence's translation.
   * @param {SearchSettings & {beforeStep?: () => Promise<void>}} options
   * @returns {Promise<Searched>}
   */
  async search({ numBeams, temperature, beforeStep }) {
    const { ids, max_target_tokens: most, extra_target_tokens: extra, search } = this.settings;
    const length = /** @type {Read} */ (this.read).ids.length + (extra ?? Infinity);
    const decoder = new PrefixDecoder(this, temperature);
    const common = { limits: [Math.min(length, most ?? Infinity, MOST_TOKENS)], eos: ids.eos, beforeStep };
    if (numBeams === 1) {
      const [[{ tokens }]] = await greedySearch(decoder, common);
      return { nodes: await this.makeChain(tokens, temperature), best: [this.name(tokens)] };
    }
    const tree = new Tree();
    const [found] = await beamSearch(decoder, {
      ...common,
      numBeams,
      numWanted: numBeams,
      lengthPenalty: search.length_penalty,
      lengthPenaltyType: search.length_penalty_type,
      earlyStopping: search.early_stopping,
      onStep: (sentence, beams) => tree.grow(beams, sentence.open, sentence.ended),
    });
    return { nodes: tree.nodes, best: found.map(({ tokens }) => this.name(tokens)) };
  }

  /**
   * @param {number[]} tokens
   * @returns {Found}
   */
  name(tokens) {
    return { tokens, text: this.translator.decode(tokens) };
  }

  /**
   * The tree of a greedy search, which has no branches.
   * @param {number[]} tokens
   * @param {number} temperature
   * @returns {Promise<TreeNode[]>}
   */
  async makeChain(tokens, temperature) {
    let score = 0;
    /** @type {TreeNode[]} */
    const nodes = [];
    for (const [step, token] of tokens.entries()) {
      const prefix = [this.settings.ids.start, ...tokens.slice(0, step)];
      const [logits] = await this.findLogits([prefix]);
      score += logSoftmax(logits, temperature)[token];
      const state = step === tokens.length - 1 ? "ended" : "open";
      nodes.push({ token, parent: step - 1, step, score, state, final: state === "ended" ? score : null });
    }
    return nodes;
  }

  /**
   * All values of the decoder while it writes these tokens.
   * @param {number[]} tokens
   * @returns {Promise<Written>}
   */
  async write(tokens) {
    const ids = [this.settings.ids.start, ...tokens.slice(0, -1)];
    return { tokens, ids, values: takeValues(await this.decode([ids])) };
  }
}

/** The beams of a search as nodes that know the one they continue. */
class Tree {
  constructor() {
    /** @type {TreeNode[]} */
    this.nodes = [];
    /** @type {Map<Beam, number>} */
    this.places = new Map();
  }

  /**
   * @param {Beam[]} found  The continuations that the search looked at, the best first.
   * @param {Beam[]} open
   * @param {{beam: Beam, score: number}[]} ended
   */
  grow(found, open, ended) {
    for (const beam of found) {
      const end = ended.find((each) => each.beam === beam);
      const state = end ? "ended" : open.includes(beam) ? "open" : "dropped";
      const parent = beam.parent ? /** @type {number} */ (this.places.get(beam.parent)) : -1;
      const step = readTokens(beam).length - 1;
      this.places.set(beam, this.nodes.length);
      this.nodes.push({ token: beam.token, parent, step, score: beam.score, state, final: end?.score ?? null });
    }
  }
}

/**
 * @param {Record<string, Tensor>} outputs  Of one sentence.
 * @returns {Values}
 */
function takeValues(outputs) {
  return Object.fromEntries(Object.entries(outputs).map(([name, { dims, data }]) =>
    [name, { dims: dims.slice(1), data: /** @type {Float32Array} */ (data).slice() }]));
}
