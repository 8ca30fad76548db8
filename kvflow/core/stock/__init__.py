"""What vLLM's own NixlConnector says on the wire: messages, texts, parameters, regions, and how long offers last."""
