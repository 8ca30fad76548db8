"""Wire of vLLM's own NixlConnector: messages, texts, parameters, regions, and how long offers last."""
