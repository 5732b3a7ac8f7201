"""Endpoints of OpenAI's Files and Batch API."""
