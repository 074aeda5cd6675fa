"""From one ONNX file to its fp16, int8 and fp8 variants, each checked against the original."""
