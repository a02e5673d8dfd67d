"""What users need to test components of their own: tiny models that load in a blink, without a download."""
