"""Posteriors as programs that need torch or onnxruntime alone: a posterior goes in, a file comes out.

`export` writes the file and `load` reads it back; `server` holds a web server around it.
"""

from net2gp.serving.export import export
from net2gp.serving.loading import Program, load

__all__ = ["Program", "export", "load"]
