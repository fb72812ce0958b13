"""Many runs: methods side by side, active learning, the paper's figures."""
