"""Transformer for topics of texts: suspicious labels, OOD texts, dict batches as in Hugging Face."""

import random

import torch
from transformers import BertConfig, BertForSequenceClassification

from ifcomp import IFComp

TOPICS = {
    "kitchen": "oven flour butter salt pepper onion pan soup bread knife recipe stir bake boil".split(),
    "weather": "rain cloud storm wind sunny frost fog snow forecast humid thunder breeze hail warm".split(),
    "sport": "goal team match coach league score player ball referee stadium win race sprint medal".split(),
}
FILLER = "the a with and then before after some very quite we they saw had it was in on".split()
WORDS = ["[PAD]", *FILLER, *(word for words in TOPICS.values() for word in words)]
random.seed(0), torch.manual_seed(0)


def text(topic: str) -> str:
    """Return a sentence with three words of the topic."""
    words = random.sample(TOPICS[topic], 3) + random.choices(FILLER, k=random.randint(3, 7))
    return " ".join(random.sample(words, len(words)))


def encode(texts: list[str], labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return padded ids, attention mask and labels, as a tokenizer does."""
    ids = torch.tensor([([WORDS.index(word) for word in line.split()] + [0] * 10)[:10] for line in texts])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    return batch if labels is None else batch | {"labels": labels}


labels = torch.arange(600) % 3
texts = [text(list(TOPICS)[label]) for label in labels]
labels[::40] = (labels[::40] + 1) % 3  # 15 wrong labels

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BertConfig.from_dict({"vocab_size": len(WORDS), "max_position_embeddings": 10, "num_labels": 3, **sizes})
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for _ in range(6):
    for rows in torch.randperm(600).split(30):
        optimizer.zero_grad()
        model(**encode([texts[row] for row in rows], labels[rows])).loss.backward()
        optimizer.step()

batches = [encode(texts[i : i + 100], labels[i : i + 100]) for i in range(0, 600, 100)]
ifc = IFComp(model).fit(batches)
print(str(ifc.coverage).splitlines()[-2])
audit = ifc.audit(batches)
for row in audit.suspects.head(3).to_dict("records"):
    print(f"{row['score']:.1f} nats: '{texts[row['index']]}' is labelled {list(TOPICS)[row['label']]}")
print(f"{len(audit.suspects)} suspects, {sum(index % 40 == 0 for index in audit.suspects['index'])} of them wrong")
gate = ifc.ood_detector([encode([text(list(TOPICS)[i % 3]) for i in range(300)])])
scores = gate.score(encode([text("sport"), "oven rain goal flour cloud team"]))
print(
    f"score of a normal and of a mixed text: {scores[0]:.2f} and {scores[1]:.2f} nats; threshold {gate.threshold:.2f}"
)
