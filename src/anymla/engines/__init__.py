"""Adapters that put anymla into serving engines; nothing else imports them."""
