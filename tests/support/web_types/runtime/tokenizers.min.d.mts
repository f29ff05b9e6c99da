// What the page's copy of @huggingface/tokenizers exports.
export * from "@huggingface/tokenizers";
