"""Serving MLPs over HTTP by the Open Inference Protocol: ``gigamlp serve``. See docs/serving.md.

Needs ``gigamlp[serve]``. Nothing here is imported before a command or a caller asks for it.
"""
