/**
 * Greedy search and beam search, as the Python package does them, in plain JavaScript: no model, no page.
 *
 * Many sentences are searched together. Each has rows in the decoder's batch: one at first, then one for each open
 * beam, and none once it is done. Numbers are rounded to float32 where PyTorch has float32.
 */

/**
 * @typedef {object} Candidates  The likeliest next tokens of each row, the best first.
 * @property {Float32Array} values  Their log-probabilities, `count` for each row.
 * @property {Int32Array} ids  The tokens.
 * @property {number} count  How many there are of each row: twice as many as beams, or all that there are.
 */

/**
 * @typedef {object} Decoder  What computes candidates, given what was decided so far.
 * @property {() => Promise<Candidates>} start  Gives the candidates for the first token, a row for each sentence.
 * @property {(tokens: number[], rows: number[]) => Promise<Candidates>} step  Makes new rows: row i is what row
 *     `rows[i]` was, continued with `tokens[i]`. Rows that are not named are gone.
 */

/**
 * @typedef {object} Beam  A translation that was begun: a leaf of a tree, whose root has no token.
 * @property {number} token
 * @property {Beam | null} parent  What it continues; `null` at the first token.
 * @property {number} score  The log-probability of all its tokens.
 * @property {number} origin  Which of its sentence's open beams it continues.
 */

/**
 * @typedef {object} Hypothesis  A translation.
 * @property {number[]} tokens  With the end symbol, if it has one.
 * @property {number} score  Its log-probability, divided by the length penalty.
 */

/**
 * @typedef {object} SearchOptions
 * @property {number[]} limits  The most tokens of each sentence's translation, the end symbol included.
 * @property {number} eos  The end symbol.
 * @property {() => void | Promise<void>} [beforeStep]  Called before each step; what it throws ends the search.
 * @property {(sentence: Sentence, found: Beam[]) => void} [onStep]  Called in beam search once a sentence is a token
 *     longer, with the continuations that it chose from.
 */

/**
 * @typedef {object} BeamOptions
 * @property {number} numBeams
 * @property {number} [numWanted]  How many translations of a sentence are returned. Default: 1.
 * @property {number} [lengthPenalty]  Alpha. Default: 0.6.
 * @property {"gnmt" | "transformers"} [lengthPenaltyType]  The paper's penalty (default), or the library's.
 * @property {boolean | "never"} [earlyStopping]  As in the transformers library. Default: false.
 */

/**
 * What log-probabilities are divided by: equation 14 of Wu et al. (2016), as in the paper, or the library's.
 * @type {Record<"gnmt" | "transformers", (length: number, alpha: number) => number>}
 */
export const LENGTH_PENALTIES = {
  gnmt: (length, alpha) => Math.fround(((5 + length) / 6) ** alpha),
  transformers: (length, alpha) => Math.fround(length ** alpha),
};

/**
 * The tokens of a beam, from the first to its own.
 * @param {Beam} beam
 * @returns {number[]}
 */
export function readTokens(beam) {
  const tokens = [];
  for (let at = /** @type {Beam | null} */ (beam); at; at = at.parent) tokens.push(at.token);
  return tokens.reverse();
}

/** One sentence's beams, open and ended. */
class Sentence {
  /**
   * @param {number} limit
   * @param {SearchOptions & Required<BeamOptions>} options
   */
  constructor(limit, options) {
    this.limit = limit;
    this.options = options;
    this.penalize = LENGTH_PENALTIES[options.lengthPenaltyType];
    this.length = 0;
    /** @type {Beam[]} The best first. */
    this.open = [];
    /** @type {{beam: Beam, score: number}[]} The best first. */
    this.ended = [];
    this.isDone = false;
  }

  /**
   * The best continuations of all open beams, the best first: twice as many as beams, so that all of these may end.
   * @param {Candidates} candidates
   * @param {number} firstRow
   * @returns {Beam[]}
   */
  findContinuations({ values, ids, count }, firstRow) {
    const wanted = 2 * this.options.numBeams;
    const found = [];
    for (let origin = 0; origin < Math.max(this.open.length, 1); origin++) {
      const parent = this.open[origin] ?? null;
      const start = (firstRow + origin) * count;
      for (let place = start; place < start + Math.min(wanted, count); place++) {
        const score = Math.fround((parent?.score ?? 0) + values[place]);
        found.push({ token: ids[place], parent, score, origin });
      }
    }
    return found.sort((a, b) => b.score - a.score).slice(0, wanted);
  }

  /**
   * Makes every beam a token longer.
   * @param {Candidates} candidates
   * @param {number} firstRow
   */
  advance(candidates, firstRow) {
    const { eos, numBeams, lengthPenalty } = this.options;
    const found = this.findContinuations(candidates, firstRow);
    this.length += 1;
    const isLast = this.length >= this.limit;
    const divisor = this.penalize(this.length, lengthPenalty);
    for (const beam of found.slice(0, numBeams)) {
      if (isLast || beam.token === eos) this.ended.push({ beam, score: Math.fround(beam.score / divisor) });
    }
    this.ended = this.ended.sort((a, b) => b.score - a.score).slice(0, numBeams);
    this.open = found.filter((beam) => beam.token !== eos).slice(0, numBeams);
    this.isDone = isLast || !this.canImprove();
    this.options.onStep?.(this, found);
  }

  /** Whether an open beam may still take the place of a translation that has ended: log-probabilities only fall. */
  canImprove() {
    const { numBeams, numWanted, lengthPenalty, lengthPenaltyType, earlyStopping } = this.options;
    const isPaper = lengthPenaltyType === "gnmt";
    if (earlyStopping === true && this.ended.length === numBeams) return false;
    const needed = isPaper ? numWanted : numBeams;
    if (this.ended.length < needed) return true;
    const isLongestBest = lengthPenalty > 0 && (isPaper || earlyStopping === "never");
    const length = isLongestBest ? this.limit : this.length + (isPaper ? 1 : 0);
    const possible = Math.fround(this.open[0].score / this.penalize(length, lengthPenalty));
    return possible > this.ended[needed - 1].score;
  }
}

/**
 * Finds the best translations of each sentence, the best first.
 * @param {Decoder} decoder
 * @param {SearchOptions & BeamOptions} options
 * @returns {Promise<Hypothesis[][]>}
 */
export async function beamSearch(decoder, options) {
  const { numBeams, numWanted = 1, lengthPenalty = 0.6, lengthPenaltyType = "gnmt", earlyStopping = false } = options;
  if (numBeams < 1 || numWanted < 1 || numWanted > numBeams) {
    throw new RangeError(`numWanted is ${numWanted} and numBeams ${numBeams}: 1 <= numWanted <= numBeams is needed.`);
  }
  const all = { ...options, numBeams, numWanted, lengthPenalty, lengthPenaltyType, earlyStopping };
  const sentences = options.limits.map((limit) => new Sentence(limit, all));
  let searched = sentences.map((sentence, firstRow) => ({ sentence, firstRow }));
  let candidates = await decoder.start();
  for (;;) {
    for (const { sentence, firstRow } of searched) sentence.advance(candidates, firstRow);
    searched = searched.filter(({ sentence }) => !sentence.isDone);
    if (!searched.length) break;
    await options.beforeStep?.();
    /** @type {number[]} */
    const tokens = [], /** @type {number[]} */ rows = [];
    searched = searched.map(({ sentence, firstRow }) => {
      const place = tokens.length;
      for (const beam of sentence.open) {
        tokens.push(beam.token);
        rows.push(firstRow + beam.origin);
      }
      return { sentence, firstRow: place };
    });
    candidates = await decoder.step(tokens, rows);
  }
  return sentences.map(({ ended }) =>
    ended.slice(0, numWanted).map(({ beam, score }) => ({ tokens: readTokens(beam), score })));
}

/**
 * Takes the likeliest token at each step. Scores are log-probabilities.
 * @param {Decoder} decoder
 * @param {SearchOptions} options
 * @returns {Promise<Hypothesis[][]>}
 */
export async function greedySearch(decoder, { limits, eos, beforeStep }) {
  const found = limits.map(() => /** @type {Hypothesis} */ ({ tokens: [], score: 0 }));
  let searched = found.map((_, sentence) => sentence);
  let candidates = await decoder.start();
  for (;;) {
    /** @type {number[]} */
    const rows = [], /** @type {number[]} */ tokens = [];
    searched = searched.filter((sentence, row) => {
      const hypothesis = found[sentence], place = row * candidates.count, token = candidates.ids[place];
      hypothesis.tokens.push(token);
      hypothesis.score = Math.fround(hypothesis.score + candidates.values[place]);
      if (token === eos || hypothesis.tokens.length >= limits[sentence]) return false;
      rows.push(row);
      tokens.push(token);
      return true;
    });
    if (!searched.length) return found.map((hypothesis) => [hypothesis]);
    await beforeStep?.();
    candidates = await decoder.step(tokens, rows);
  }
}
