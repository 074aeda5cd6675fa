"""TensorRT plans: made of a variant's ONNX file on the GPU that runs them, and kept on its host."""
