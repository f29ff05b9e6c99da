// How the page's JavaScript is linted; types are tsc's concern.
import { join } from "node:path";
import { createRequire } from "node:module";

const packages = process.env.VANILLA_TRANSFORMER_NODE_MODULES;
const js = createRequire(join(packages, "any.js"))("@eslint/js");

export default [
  js.configs.recommended,
  {
    rules: {
      "no-undef": "off",  // tsc knows which names there are
      "curly": ["error", "multi-line"],
      "eqeqeq": "error",
      "no-implicit-globals": "error",
      "no-shadow": "off",
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
      "prefer-template": "error",
      "no-restricted-globals": ["error", "eval"],
    },
  },
];
