"""Rewards over HTTP: what is sent (wire), who asks (client) and who answers (server)."""
