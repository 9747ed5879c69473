"""The wire between all parts: .proto sources, their generated stubs, and how to serve and dial them."""
