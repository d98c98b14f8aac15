"""Block denoising: unmask rules, the step and block programs, whole generations."""
