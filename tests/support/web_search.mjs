// Searches with an exported page's search.js: node web_search.mjs SEARCH_JS.
//
// Reads {tables, options} from standard input, as JSON. A table, one for each sentence, has the log-probabilities of
// the next tokens behind each prefix, by the prefix's tokens, joined by commas. Writes what each search finds.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const { beamSearch, greedySearch } = await import(pathToFileURL(resolve(process.argv[2])).href);
const { tables, options } = JSON.parse(readFileSync(0, "utf-8"));

class TableDecoder {
  start() {
    this.prefixes = tables.map((_, table) => ({ table, tokens: [] }));
    return this.look();
  }

  step(tokens, rows) {
    this.prefixes = rows.map((row, place) => {
      const { table, tokens: before } = this.prefixes[row];
      return { table, tokens: [...before, tokens[place]] };
    });
    return this.look();
  }

  async look() {
    const rows = this.prefixes.map(({ table, tokens }) =>
      tables[table][tokens.join()].map((value, id) => ({ value, id })).sort((a, b) => b.value - a.value));
    return {
      values: Float32Array.from(rows.flat(), ({ value }) => value),
      ids: Int32Array.from(rows.flat(), ({ id }) => id),
      count: rows[0].length,
    };
  }
}

const search = options.numBeams === 1 ? greedySearch : beamSearch;
process.stdout.write(JSON.stringify(await search(new TableDecoder(), options)));
