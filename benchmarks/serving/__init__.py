"""Servers under load: how they are started, asked, and what is made of their answers."""
