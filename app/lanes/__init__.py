"""What a router does for the lanes it owns: `owner.py` takes requests in, `procedures.py` acts."""
