"""HTTP server of a process: connections, bounds, authentication, probes."""
