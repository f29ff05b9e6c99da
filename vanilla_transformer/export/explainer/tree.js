/** The beams of a search as a growing tree: a column for each token. */

/** @import { TreeNode } from "./tracer.js" */
import { format, say } from "./texts.js";

const ROW = 34, WIDTH = 122, HEIGHT = 26;
/** Pixels from one step to the next. */
export const COLUMN = 148;
const PACE = 700;  // milliseconds for each step of a growing tree
const SPACE = "http://www.w3.org/2000/svg";

/**
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 */
function draw(name, attributes, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, `${value}`);
  made.append(...children);
  return made;
}

/**
 * The tokens from the root to a node.
 * @param {TreeNode[]} nodes
 * @param {number} place
 * @returns {number[]}
 */
export function readPath(nodes, place) {
  const { token, parent } = nodes[place];
  return parent < 0 ? [token] : [...readPath(nodes, parent), token];
}

/**
 * The place of the node that these tokens lead to, or -1.
 * @param {TreeNode[]} nodes
 * @param {number[]} tokens
 */
export function findNode(nodes, tokens) {
  let place = -1;
  for (const [step, token] of tokens.entries()) {
    const parent = place;
    place = nodes.findIndex((node) => node.step === step && node.parent === parent && node.token === token);
    if (place < 0) return -1;
  }
  return place;
}

/**
 * Lets a tree grow, a column after the other, as the search did.
 * @param {SVGSVGElement} tree
 * @param {(x: number) => void} onStep  Told where the newest column ends.
 */
export function grow(tree, onStep) {
  const parts = [...tree.querySelectorAll("[data-step]")];
  const stepOf = (/** @type {Element} */ part) => Number(part.getAttribute("data-step"));
  const last = Math.max(...parts.map(stepOf));
  const show = (/** @type {number} */ step) => {
    for (const part of parts) part.classList.toggle("later", stepOf(part) > step);
    onStep((step + 1) * COLUMN);
    // A tree that was replaced by another one grows no more.
    if (step < last && tree.isConnected) setTimeout(show, PACE, step + 1);
  };
  show(0);
}

/**
 * @param {object} options
 * @param {TreeNode[]} options.nodes
 * @param {number[]} options.best  The tokens of the translation that won.
 * @param {number[]} options.followed  The tokens that are looked at.
 * @param {string[]} options.labels  Of all tokens.
 * @param {(place: number) => void} options.onChoose
 * @returns {SVGSVGElement}
 */
export function makeTree({ nodes, best, followed, labels, onChoose }) {
  /** @type {number[]} */
  const heights = [];
  const places = nodes.map(({ step }) => {
    heights[step] = (heights[step] ?? -1) + 1;
    return { x: step * COLUMN + 4, y: heights[step] * ROW + 4 };
  });
  const columns = heights.length, rows = Math.max(...heights) + 1;
  const [width, height] = [columns * COLUMN + 8, rows * ROW + 8];
  const ways = [best, followed].map((tokens) =>
    new Set(tokens.map((_, step) => findNode(nodes, tokens.slice(0, step + 1)))));
  const chosen = Math.max(findNode(nodes, followed), 0);
  const lines = nodes.map(({ parent }, place) => {
    if (parent < 0) return "";
    const [from, to] = [places[parent], places[place]];
    const [x, y, half] = [from.x + WIDTH, from.y + HEIGHT / 2, (COLUMN - WIDTH) / 2];
    const end = to.y + HEIGHT / 2;
    const d = `M ${x} ${y} C ${x + half} ${y} ${x + half} ${end} ${to.x} ${end}`;
    const kind = ways[0].has(place) ? "best" : nodes[place].state;
    return draw("path", { d, "data-step": nodes[place].step, class: `edge ${kind}` });
  });
  const boxes = nodes.map((node, place) => {
    const before = node.parent < 0 ? 0 : nodes[node.parent].score;
    const probability = Math.exp(node.score - before);
    const classes = ["node", node.state, ways[0].has(place) ? "best" : "", ways[1].has(place) ? "followed" : ""];
    const put = {
      ...{ token: labels[node.token], step: node.step + 1, probability: format(probability) },
      ...{ score: format(node.score), state: say(`tree.${node.state}`) },
    };
    const { x, y } = places[place];
    const label = labels[node.token];
    const made = draw(
      "g",
      {
        ...{ class: classes.filter(Boolean).join(" "), transform: `translate(${x} ${y})`, role: "button" },
        ...{ tabindex: place === chosen ? 0 : -1, "aria-label": say("tree.node", put), "data-node": place },
        "data-step": node.step,
      },
      draw("title", {}, say("tree.node", put)),
      draw("rect", { width: WIDTH, height: HEIGHT, rx: 6 }),
      draw("text", { x: 7, y: 17.5 }, label.length > 10 ? `${label.slice(0, 9)}…` : label),
      draw("text", { x: WIDTH - 6, y: 17.5, class: "share" },
        probability < 0.005 ? "<1%" : `${Math.round(100 * probability)}%`),
    );
    made.addEventListener("click", () => onChoose(place));
    return made;
  });
  const svg = /** @type {SVGSVGElement} */ (draw(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": say("tree.title") },
    ...lines, ...boxes,
  ));
  svg.addEventListener("keydown", (event) => {
    const at = boxes.indexOf(/** @type {any} */ (document.activeElement));
    if (at < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onChoose(at);
      return;
    }
    const column = nodes.map((_, place) => place).filter((place) => nodes[place].step === nodes[at].step);
    /** @type {Record<string, number | undefined>} */
    const moves = {
      ArrowLeft: nodes[at].parent,
      ArrowRight: nodes.findIndex(({ parent }) => parent === at),
      ArrowUp: column[column.indexOf(at) - 1],
      ArrowDown: column[column.indexOf(at) + 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const next = moves[event.key] ?? -1;
    if (next < 0) return;
    boxes[at].setAttribute("tabindex", "-1");
    boxes[next].setAttribute("tabindex", "0");
    /** @type {SVGGElement} */ (boxes[next]).focus();
  });
  return svg;
}
