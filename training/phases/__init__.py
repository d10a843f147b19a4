"""The five phases on TRL's trainers, and the counting trainer that rehearses their machinery."""
