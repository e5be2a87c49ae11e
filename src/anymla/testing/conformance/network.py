"""Cases C5 .. C7: whole models, engines and speculation."""
