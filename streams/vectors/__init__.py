"""Test vectors of the stream reconstruction rule, for other languages; `README.md` explains them.

`python -m streams.vectors` writes the JSON files again, byte for byte the same.
"""
