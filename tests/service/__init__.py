"""The service: over HTTP where HTTP is the point, over real Ray Serve where that is."""
