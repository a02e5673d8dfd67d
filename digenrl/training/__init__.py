"""The trainer: summed gradients over packed pairs, one division, one optimizer step."""
