"""Doors turn bytes into requests and replies into bytes.  No rules here."""
