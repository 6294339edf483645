"""Torch step -> ONNX -> checked -> engine -> bundle."""
