// What the page's copy of onnxruntime-web exports.
export * from "onnxruntime-common";
