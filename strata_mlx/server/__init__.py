"""The server: OpenAI's and Anthropic's protocols over one engine that decodes requests together, and a page."""
