"""Deployments on one machine, as child processes."""
