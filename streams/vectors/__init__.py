"""Test vectors of the stream reconstruction rule, for readers in any language: `README.md`."""
