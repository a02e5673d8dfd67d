"""Model families on top of diffusers' pipelines. A model file knows no algorithm."""
