"""Posteriors as programs that need torch or onnxruntime alone."""
