"""Number formats, page layouts, and their encoders and decoders."""
