"""Flow-matching mathematics: schedules, one denoising step as a distribution, keyed noise, sampling."""
