"""Test vectors of the reader's rule, for readers in other languages; `README.md` explains them.

`python -m streams.vectors` writes the JSON files again, byte for byte the same.
"""
