/** Texts in, translations out: the tokenizer, batches of sentences of like length, and a search. */

/** @import { Engine } from "./engine.js" */
/** @import { BeamOptions, Hypothesis } from "./search.js" */
import { beamSearch, greedySearch } from "./search.js";

/**
 * What is needed of the npm package @huggingface/tokenizers.
 * @typedef {{
 *   encode: (text: string) => {ids: number[]},
 *   decode: (ids: number[], options: {skip_special_tokens: boolean}) => string,
 * }} TextTokenizer
 */

/**
 * @typedef {object} Settings  The exported `settings.json`, as far as translating needs it.
 * @property {{eos: number, pad: number, start: number}} ids
 * @property {number} most_beams  The decoder gives twice as many candidates.
 * @property {string} prefix  What the model wants before each text.
 * @property {number | null} max_source_tokens  A longer text is cut.
 * @property {number | null} max_target_tokens  The most tokens of a translation.
 * @property {number | null} extra_target_tokens  How many it may have more than its source.
 * @property {{num_beams: number, length_penalty: number, length_penalty_type: "gnmt" | "transformers",
 *     early_stopping: boolean | "never"}} search
 */

/**
 * @typedef {object} TranslationOptions  What is not said, the settings say.
 * @property {number} [numBeams]  1 is greedy search.
 * @property {number} [numWanted]  Translations of each text. Default: 1.
 * @property {number} [lengthPenalty]
 * @property {() => void | Promise<void>} [beforeStep]  See search.js.
 * @property {(index: number, result: Result) => void} [onResult]  Called as soon as a text is translated.
 */

/**
 * @typedef {object} Result
 * @property {{text: string, score: number, tokens: number[]}[]} translations  The best first; of an empty text, none.
 * @property {boolean} isCut  Whether the text was too long and its end is not translated.
 */

// With more rows, a step takes longer than it saves.
const MOST_ROWS = 128;
// Padded tokens of a batch's sources, times beams: what memory the cache takes grows with it.
const MOST_TOKENS = 8192;

/**
 * The places of texts in batches: of like length, so that little is padded.
 * @param {number[]} lengths
 * @param {number} numBeams
 * @returns {number[][]}
 */
export function makeBatches(lengths, numBeams) {
  const places = lengths.map((_, place) => place).filter((place) => lengths[place]);
  places.sort((a, b) => lengths[a] - lengths[b] || a - b);
  /** @type {number[][]} */
  const batches = [];
  for (const place of places) {
    const last = batches.at(-1);
    const rows = ((last?.length ?? 0) + 1) * numBeams;
    if (last && rows <= MOST_ROWS && rows * lengths[place] <= MOST_TOKENS) last.push(place);
    else batches.push([place]);
  }
  return batches;
}

/** A model with its tokenizer. */
export class Translator {
  /**
   * @param {Engine} engine
   * @param {TextTokenizer} tokenizer
   * @param {Settings} settings
   */
  constructor(engine, tokenizer, settings) {
    this.engine = engine;
    this.tokenizer = tokenizer;
    this.settings = settings;
  }

  /**
   * The ids of a text, and whether its end was cut off; none of a text without letters.
   * @param {string} text
   * @returns {{ids: number[], isCut: boolean}}
   */
  encode(text) {
    if (!text.trim()) return { ids: [], isCut: false };
    const { max_source_tokens: most, prefix, ids: { eos } } = this.settings;
    const { ids } = this.tokenizer.encode(prefix + text);
    if (most === null || ids.length <= most) return { ids, isCut: false };
    return { ids: [...ids.slice(0, most - 1), eos], isCut: true };
  }

  /**
   * Translates texts, each by itself: line breaks in them are nothing special.
   * @param {string[]} texts
   * @param {TranslationOptions} [options]
   * @returns {Promise<Result[]>}
   */
  async translate(texts, options = {}) {
    const encoded = texts.map((text) => this.encode(text));
    const results = encoded.map(({ isCut }) => /** @type {Result} */ ({ translations: [], isCut }));
    encoded.forEach(({ ids }, place) => { if (!ids.length) options.onResult?.(place, results[place]); });
    const numBeams = options.numBeams ?? this.settings.search.num_beams;
    for (const batch of makeBatches(encoded.map(({ ids }) => ids.length), numBeams)) {
      const found = await this.search(batch.map((place) => encoded[place].ids), { ...options, numBeams });
      batch.forEach((place, index) => {
        results[place].translations = found[index].map((each) => ({ ...each, text: this.decode(each.tokens) }));
        options.onResult?.(place, results[place]);
      });
    }
    return results;
  }

  /**
   * @param {number[]} tokens
   * @returns {string}
   */
  decode(tokens) {
    return this.tokenizer.decode(tokens, { skip_special_tokens: true });
  }

  /**
   * Translates one batch of ids.
   * @param {number[][]} sentences
   * @param {TranslationOptions & {numBeams: number}} options
   * @returns {Promise<Hypothesis[][]>}
   */
  async search(sentences, { numBeams, numWanted = 1, lengthPenalty, beforeStep }) {
    const { most_beams: mostBeams } = this.settings;
    if (!(numBeams >= 1 && numBeams <= mostBeams)) {
      throw new RangeError(`numBeams is ${numBeams}: it can be 1 to ${mostBeams}.`);
    }
    const { ids, search, max_target_tokens: most, extra_target_tokens: extra } = this.settings;
    const limits = sentences.map(({ length }) =>
      Math.min(extra === null ? Infinity : length + extra, most ?? Infinity));
    const decoder = this.engine.decode(await this.engine.encode(sentences));
    const common = { limits, eos: ids.eos, beforeStep };
    if (numBeams === 1) return greedySearch(decoder, common);
    /** @type {BeamOptions} */
    const beams = {
      numBeams,
      numWanted,
      lengthPenalty: lengthPenalty ?? search.length_penalty,
      lengthPenaltyType: search.length_penalty_type,
      earlyStopping: search.early_stopping,
    };
    return beamSearch(decoder, { ...common, ...beams });
  }
}
