"""Varied chat prompts from our own templates and topics: what people ask a small chat model.

`python -m forerun.training.chat_prompts -o FILE.jsonl` writes a prompt file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import click

from forerun.training.chat_texts import TEXTS
from forerun.training.chat_words import LISTS

WORDS = LISTS | TEXTS

TEMPLATES: dict[str, tuple[str, ...]] = {
    "writing": (
        "Write a short story about {thing} in {place}.",
        "Write a poem about {thing}.",
        "Compose a blog post about {activity} for beginners, with a catchy title.",
        "Write the opening paragraph of a {genre} novel set in {place}.",
        "Describe {place} at dawn so vividly that the reader can smell it.",
        "Write a persuasive paragraph that convinces {audience} to try {activity}.",
        "Draft a product description for {product}.",
        "Write a review of {product} that mentions two strengths and one weakness.",
        "Write a dialogue between {person} and {person2} about {subject}.",
        "Create a character who is {person} with an unusual secret. Describe them in detail.",
        "Write a speech of about one hundred words for {occasion}.",
        "Write a social media post announcing {occasion}.",
        "Outline an article that compares {product} with {product2}.",
        "Write a travel article about a weekend in {country}, with food and local customs.",
        "Tell a joke about {person}.",
        "Write a haiku about {nature}.",
        'Finish this story: "When {person} opened the door, there was nothing but {thing}."',
    ),
    "email": (
        "Write a polite email to {recipient} about {matter}.",
        "Draft a short email to {recipient} asking for {favour}.",
        "Write an email to {recipient} apologising for {mishap}.",
        "Help me write a cover letter for a job as {person}.",
        "Write a thank-you note to {recipient} after {occasion}.",
        "Write a complaint to a shop about {product} that broke after a week.",
        "Write a formal letter that declines an invitation to {occasion}.",
    ),
    "explain": (
        "Explain {science} to {audience}.",
        "What is {science}, and why does it matter?",
        "How does {device} work?",
        "Explain the difference between {science} and {science2}.",
        "Why {why}?",
        "Can you explain {computing} in simple terms?",
        "What are the main causes and effects of {history}?",
        "Explain {economics} with an everyday example.",
        "Give me a quick introduction to {science}.",
    ),
    "how-to": (
        "How do I {task}?",
        "Give me step-by-step instructions to {task}.",
        "What do I need to know before I {task}?",
        "What is the best way to {task} on a small budget?",
        "I have never tried to {task}. Where should I start?",
        "What are common mistakes when people {task}?",
    ),
    "list": (
        "List five benefits of {activity}.",
        "Give me ten ideas for {occasion}.",
        "Name seven things to see in {country}.",
        "List three advantages and three disadvantages of {subject}.",
        "Suggest five names for {business}.",
        "What are some healthy meals with {food}?",
        "List the ingredients and the steps for a simple dish with {food}.",
        "Give me six questions to ask {person} in an interview.",
        "Recommend five books for someone who likes {genre} stories.",
        "Name four tools that {person} uses every day and what each is for.",
    ),
    "coding": (
        "Write a Python function that {program}.",
        "Write a {language} program that {program}.",
        "Explain what {computing} is, with a short code example.",
        "How would you test a function that {program}?",
        "Write an SQL query that finds {query}.",
        "Write a regular expression that matches {pattern} and explain it.",
        "What is the time complexity of {algorithm}? Show an implementation in {language}.",
        "My program should {program2}, but it crashes on empty input. What should I check?",
        "Create an HTML page about {activity} with a heading and a list.",
    ),
    "maths": (
        "{name} has {a} {items} and buys {b} more. {name2} takes {c}. How many are left?",
        "A train travels {a} kilometres in {c} hours. What is its average speed?",
        "What is {a} times {c}, plus {b}?",
        "A shirt costs {a} dollars and is reduced by {percent} percent. What does it cost now?",
        "If {c} workers finish a job in {b} days, how long do {d} workers need?",
        "Solve for x: {c}x + {b} = {a}.",
        "The sides of a rectangle are {a} and {b} metres. Find its area and perimeter.",
        "{name} saves {a} dollars every month. How much is that after {c} years?",
        "What is the probability of drawing one of {c} red balls from a bag of {a} balls?",
        "Find the average of {a}, {b} and {c}. Show your work.",
    ),
    "reasoning": (
        "{name} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest?",
        "Which word does not belong with the others: {food}, {food2}, {device}, {food3}? Why?",
        "If it rains, {name} stays at home. {name} is not at home. What follows?",
        "Is this argument sound? All {items} are useful. This is useful, so it is one of them.",
        "What would happen to {nature} if the average temperature rose by five degrees?",
        "{name} left before {name2} but arrived after {name3}. Who arrived first?",
        "Suppose you can take only three things to {place}. What do you take, and why?",
        "Would {subject} be good for a small town? Think it through step by step.",
    ),
    "roleplay": (
        "You are {person}. {name} asks you for advice about {matter}. What do you say?",
        "Pretend to be {person} from {place} and tell me about your day.",
        "Act as an interviewer who hires {person}. Ask me the first three questions.",
        "Imagine you are {nature}. Describe what you feel over a year.",
        "Play a travel guide in {country}. Greet the group and present the plan for today.",
        "You are a patient teacher. A student says that {science} is boring. Answer in character.",
        "Speak as a famous detective who investigates {mishap}.",
    ),
    "extraction": (
        "Extract every name, place and date from this text: {passage}",
        "Turn the facts in this text into a JSON object: {passage}",
        "Who is mentioned in the following text, and what do they want? {passage}",
        "Is the tone of this message positive, negative or neutral? {review}",
        "Give the main topic of this text in one line: {passage}",
        "List the numbers in this text and say what each stands for: {passage}",
        "Rate each of these opinions from one to five stars: 1. {review} 2. {review2}",
    ),
    "summary": (
        "Summarise this text in two sentences: {passage}",
        "Give me the gist of the following: {passage} {passage2}",
        "What is the key message here? {passage}",
        "Write a headline for this piece of news: {passage}",
        "Explain this text to {audience}: {passage}",
    ),
    "rewrite": (
        "Rewrite this more formally: {review}",
        "Correct the spelling and grammar: {broken}",
        "Make this shorter: {passage}",
        "Rewrite this sentence for {audience}: {passage}",
        "Turn this into a friendly message: {review}",
        "Rewrite the following in the past tense: {broken}",
        'Give me three other ways to say: "{phrase}"',
        "Translate into simple English: {passage}",
    ),
    "stem": (
        "What role does {science} play in everyday life?",
        "Describe an experiment that shows {science} to {audience}.",
        "How was {science} discovered?",
        "What are the limits of our knowledge about {science}?",
        "How would an engineer design {device} for {place}?",
        "Which physical principles make {device} possible?",
        "Explain how {nature} affects the climate.",
        "What is the relation between {science} and {science2}?",
    ),
    "humanities": (
        "What can we learn today from {history}?",
        "Compare {history} with {history2}.",
        "Describe the culture and traditions of {country}.",
        "How did {history} change the life of ordinary people?",
        "Discuss the ethical questions around {subject}.",
        "How would a philosopher argue about {subject}?",
        "Explain how {economics} influences a country's politics.",
        "Write a lesson plan about {history} for {audience}.",
    ),
    "planning": (
        "Plan a three-day trip to {country} for {audience}.",
        "Make a weekly schedule for someone who wants to {task}.",
        "I want to start {business}. What should I do in the first month?",
        "Help me organise {occasion} with a budget of {a}0 dollars.",
        "Create a study plan to learn about {science} in four weeks.",
        "Plan a simple dinner for {c} guests around {food}.",
    ),
    "opinion": (
        "What do you think about {subject}?",
        "Should schools teach {activity}? Give reasons.",
        "Is {product} worth the money?",
        "Which is better, {activity} or {activity2}?",
        "Do you agree that {subject} makes people happier? Explain.",
        "What are the arguments for and against {subject}?",
        "How can I stay motivated while {activity}?",
        "I feel nervous about {matter}. What can I do?",
    ),
    "facts": (
        "What is the capital of {country}?",
        "Which language is spoken in {country}?",
        "When did {history} take place?",
        "What is {food} made of?",
        "Who invented {device}?",
        "What does {person} do?",
        "Where does {food} come from?",
        'What is the meaning of the word "{adjective}"?',
        'Give a synonym and an antonym of "{adjective}".',
        "What animals live near {nature}?",
        "Tell me an interesting fact about {nature}.",
        'Use the word "{adjective}" in three sentences.',
        "Hi! Can you tell me something about {thing}?",
    ),
}
"""Prompt templates by category; braces name a list of `WORDS`, a digit another item of it."""


def chat_prompts(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yields `count` distinct prompts as (category, text), the same ones for the same seed.

    Categories take turns, each category's templates too; the words are drawn at random.
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    turn = 0
    while len(seen) < count:
        category = list(TEMPLATES)[turn % len(TEMPLATES)]
        templates = TEMPLATES[category]
        text = _fill(templates[turn // len(TEMPLATES) % len(templates)], draw)
        turn += 1
        if text not in seen:
            seen.add(text)
            yield category, text


def _fill(template: str, draw: random.Random) -> str:
    values: dict[str, str | int] = {}
    for kind, choices in WORDS.items():
        for suffix, choice in zip(("", "2", "3"), draw.sample(choices, 3), strict=True):
            values[kind + suffix] = choice
    values |= {"a": draw.randint(40, 400), "b": draw.randint(12, 39), "c": draw.randint(2, 9)}
    values |= {"d": draw.randint(10, 20), "percent": draw.randrange(5, 60, 5)}
    text = template.format(**values)
    return text[0].upper() + text[1:]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSON lines.")
@click.option("--count", type=click.IntRange(min=1), default=6000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(output: Path, count: int, seed: int) -> None:
    """Writes chat prompts for `forerun synthesize`."""
    with output.open("w", encoding="utf-8") as stream:
        for category, text in chat_prompts(count, seed):
            message = {"role": "user", "content": text}
            line = {"messages": [message], "category": f"chat/{category}"}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
