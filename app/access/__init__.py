"""API keys, tenants and their limits: pure but for reading and writing the file of keys."""
