"""`fleet add`: an ONNX file becomes a model of the configuration, after it has been tried."""
