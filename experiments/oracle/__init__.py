"""How well influence predicts hindsight models that were really trained."""
