"""Pages and pictures of runs and studies."""
