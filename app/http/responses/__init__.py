"""HTTP endpoints in the form of OpenAI's Responses API."""
