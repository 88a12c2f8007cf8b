"""Record once what a model drafts, accepts and routes, then replay any policy on it in virtual time."""
